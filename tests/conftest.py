"""Puts this folder on the path, so that all tests may import models_for_tests."""
