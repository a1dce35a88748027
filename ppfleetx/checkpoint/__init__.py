"""Saving and loading a run, whatever its layout. The format, byte by byte: README.md beside this file.

From the bottom up: `regions` (parts of a tensor and what they share), `layout` (what a rank holds → what files hold), `shards`
(safetensors files), `manifest` (what a folder must hold), `reader` (any part of any tensor), `manager` (save and find);
and for people: `stream` (tensors in pieces), `inspect`, `compare`, `fingerprint`, `weights` (one plain file).
All but `manager` is plain NumPy: looking into a checkpoint imports no Paddle. Nothing in a checkpoint can execute code.
"""
