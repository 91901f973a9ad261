"""graphsrt: a plain Hugging Face causal LM, rewritten as one FX graph into a tensor-parallel, paged serving program."""
