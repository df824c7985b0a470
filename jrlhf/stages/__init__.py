"""The stages of a run and their order. Only modules of this folder and the commands read `Context`."""
