"""Where state lives: records, slots, tiers, and the store that knows who is where."""
