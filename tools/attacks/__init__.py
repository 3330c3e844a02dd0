"""User code that has broken the promise of private training, and attacks through it."""
