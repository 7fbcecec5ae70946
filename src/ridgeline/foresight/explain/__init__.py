"""Why a request took as long as it did, in words, pictures and other settings."""
