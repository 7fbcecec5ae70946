"""The CPU backend: kernels emitted as LLVM IR from Python, one compiled call per step.

The only place that imports llvmlite. Read in this order: ``ir`` (how kernels are written), ``isa``
(what differs between processors), ``linear``, ``rows``, ``attention``, ``head``, ``draw`` (the
kernels), ``forward`` (a step), ``threads``, ``module`` (compile and cache), ``pack`` (weights),
``runner``.
"""
