"""Datasets: files and hub names -> examples -> token ids."""
