"""Latencies of a serving benchmark as pictures: matplotlib's, and a page that needs nothing."""
