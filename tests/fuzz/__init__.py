"""What nobody should have written: files made of real ones, changed at random, and what must hold of whatever becomes of them."""
