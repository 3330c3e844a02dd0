"""Gradient modes: how one micro-batch gives the sum of clipped per-record gradients."""
