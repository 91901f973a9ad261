"""Tensor parallelism for every decoder-only causal LM of transformers, inferred and proved, as a table.

- ``architectures``  which there are, and which are no decoder
- ``tiny_config``    a tiny config of any of them, from the class's own defaults
- ``tiny_model``     its random weights, and transformers' eager logits
- ``measure``        one architecture: captured once, divided, executed, compared
- ``audit``          bytes and collectives of a sharded program against the fewest possible
- ``pieces``         chunks and single tokens of two sequences through the paged pool
- ``driver``         all of them, each in a process of its own; resumable
- ``table``          rows as text and markdown
"""
