"""Images of requests, from the URL that names one to the number of tokens that it takes."""
