"""The demonstration: real digits, plain and within a quarter of the memory for saved values."""

from belady.demo.comparison import demo
from belady.demo.result import DemoResult

__all__ = ["DemoResult", "demo"]
