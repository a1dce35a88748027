"""Layers that every model is made of. A layer is ordinary where its tensor group has one member."""
