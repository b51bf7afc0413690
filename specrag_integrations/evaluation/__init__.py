"""Evaluation: is Speculative RAG better than standard RAG, with these models and this data?

Everything here runs above the package's own public engines: `specrag eval` and `specrag calibrate`
are its users.
"""
