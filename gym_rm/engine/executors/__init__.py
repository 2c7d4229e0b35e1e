"""Where does the forward run? One file per answer."""
