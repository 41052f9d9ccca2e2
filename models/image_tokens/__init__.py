"""Autoregressive models of images, whose tokens are codes of a grid."""
