"""Images, videos and sounds of requests: from URLs to tokens in the prompt and pixels."""
