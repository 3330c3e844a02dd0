"""Differentially private training: what bounds, noises and accounts for what one record can change."""
