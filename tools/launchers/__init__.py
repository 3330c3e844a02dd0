"""Launchers that are run for real: torchrun over two hosts, SLURM, Ray, submitit and pods."""
