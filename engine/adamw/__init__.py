"""The AdamW update, in one formula and several bit-identical implementations."""
