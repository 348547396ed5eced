"""Settings: schema, loading, presets."""
