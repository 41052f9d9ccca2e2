"""Drafters that combine other drafters or choose among them."""
