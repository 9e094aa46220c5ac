"""What guesses tokens beside a model: trained heads, EAGLE-3, chains of them on a device."""
