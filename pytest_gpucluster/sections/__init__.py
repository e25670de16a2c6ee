"""The sections of a workload: what can be set of each benchmark, what it means, how it is written, what is allowed.

All of that stands once, at the attribute that it fills: the loader, the command line, the JSON Schema and the documents
are made from it. A new key is one line; a new section is a class here and a line in ``workloads.Workload``.
"""
