"""Routers with sigmoid scores: those of DeepSeek-V3, GLM-4.5 and LLaDA2."""
