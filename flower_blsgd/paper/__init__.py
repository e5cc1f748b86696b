"""The laboratory: the paper's tables and figures, and the code that its authors released.

The rest of the package never imports it. Only the command line does, and tables of names
(``"module:name"``) refer to it.
"""
