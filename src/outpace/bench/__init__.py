"""Measuring: prompts, the three-way comparison, models of realistic cost."""
