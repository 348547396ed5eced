"""Bytes to files and back: asynchronous, checked, and without knowledge of tensors."""
