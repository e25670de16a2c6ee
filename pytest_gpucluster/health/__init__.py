"""Is a GPU well, beyond its speed? Pure checks, one kind a file, from what was gathered to findings.

``gathering`` asks (NVML, kernel log, PCI bus, process table) and puts the GPU under load meanwhile; ``examination``
applies every check. Source of what is demanded: the SKU's ``hardware.Promise``, else the card's own word.
"""
