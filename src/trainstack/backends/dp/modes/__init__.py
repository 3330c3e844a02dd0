"""Gradient modes: ways to compute the sum of clipped per-record gradients of a micro-batch."""
