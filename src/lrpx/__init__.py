"""LRPx: why did the transformer predict this?"""
