// What cannot wait for the page's modules, or has to be said if they never run. So this file is not a module.

(() => {
  const step = Number(location.hash.match(/^#step-([1-7])$/)?.[1] ?? 1);
  document.querySelectorAll("main > section").forEach((section, i) => (section.hidden = i !== step - 1));
  const line = document.getElementById("loading");
  if (location.protocol === "file:") {
    line.className = "refused";
    line.textContent = "Serve this folder: run python -m http.server in it and open http://localhost:8000.";
    return;
  }
  const complain = ({ target, message }) => {
    if (document.body.dataset.state !== "loading") return;
    if (target.type === "module") line.textContent = "Part of the page did not load. Check your connection and reload.";
    else if (message) line.textContent = `This browser is too old for the page: ${message}.`;
  };
  addEventListener("error", complain, true);
})();
