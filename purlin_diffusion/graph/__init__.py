"""CUDA graphs of what a pipeline calls again and again: the denoiser's forward and the VAE's decode.

A call is known by its key: the model's state, the structure of the arguments, and what torch keeps beside them. The first call of a key runs eagerly
and so prepares everything (exchanges, handles, kernels), the second is recorded and replayed, later ones are replayed: inputs are copied in, outputs
copied out. A root call runs one forward on every rank, whichever of the three it is, so ranks' exchanges always pair.

- key.py: what makes two calls the same; state.py: what makes a model the same, and what forbids a graph of it;
- take.py: one recorded call; store.py: those of one model, which is due, and when they go; gate.py: where ranks that are threads meet;
- recorder.py: what a recorder is; cuda.py: the one that torch gives; tests have another, so that all else is tested without a GPU;
- policy.py: why a model gets no graphs at all; decoding.py: the VAE's decode; lint.py: what in a forward would forbid a graph, found on the CPU.
"""
