"""What images cost the router and whoever decodes beside them."""
