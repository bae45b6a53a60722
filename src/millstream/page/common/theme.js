// Sets the chosen theme before the page is drawn. A plain script, not a module: modules run after the first paint.
(function () {
  try {
    const theme = localStorage.getItem("millstream.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage is blocked in this browser: the theme of the system is used.
  }
})();
