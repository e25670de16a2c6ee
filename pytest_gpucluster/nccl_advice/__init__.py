"""Which of NCCL's variables a node needs, and why: facts of the node -> its fabric -> advice -> text.

Only ``gathering`` looks at the node. Nothing here sets a variable.
"""
