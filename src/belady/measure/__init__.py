"""Traces, machines and iterations, measured with torch."""
