"""Seconds of kernels, messages and generation on a described machine."""
