"""Attention over sharded tokens: one function, `sharded_attention`, and one file a mode."""
