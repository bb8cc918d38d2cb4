"""Measuring: prompts and loads, drafters beside plain decoding, which layers can draft, ballast."""
