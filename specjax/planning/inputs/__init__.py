"""Inputs of the planner: chip topologies, model configs, and checks of denoiser settings."""
