"""The package has tests of its own, run where it is installed: see tests/test_examples.py."""

collect_ignore = ["fold_norm_package"]
