"""Speculation in torch: trained heads, EAGLE-3, n-grams on a device, chains of drafting steps."""
