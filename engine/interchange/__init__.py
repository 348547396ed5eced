"""Checkpoints in the formats of others, out and in. See docs/formats.md."""
