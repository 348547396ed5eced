"""Measurements with their provenance."""
