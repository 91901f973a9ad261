"""`graphsrt bench`: this engine and others on the same model and machine, in turn, beside what the machine can do.

Every engine is a process of its own, in a Python environment of its own where it needs one, that does what it is told
over a pipe (``engines/``). Measurements go round the engines, so that what else the machine does falls on all of them.
"""
