"""Runs of real launchers: torchrun on two hosts, SLURM, Ray, submitit and pods."""
