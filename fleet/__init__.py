"""Running a federation: certificates, registration, submission; a federation or checkup here."""
