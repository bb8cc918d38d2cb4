"""Training of the models outpace ships: corpus, tokenizer, loop, objectives."""
