"""User code that has broken the promise of private training, and what an attacker makes of it."""
