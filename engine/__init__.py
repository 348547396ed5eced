"""What a training step does."""
