// Light or dark: what the system prefers, or what was chosen here.

const KEY = "kvferry-console-theme";
const CHOICES = ["auto", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");

export class Theme {
  constructor(button) {
    this.button = button;
    this.choice = CHOICES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "auto";
    button.addEventListener("click", () => this.next());
    dark.addEventListener("change", () => this.apply());
    this.apply();
  }

  next() {
    this.choice = CHOICES[(CHOICES.indexOf(this.choice) + 1) % CHOICES.length];
    localStorage.setItem(KEY, this.choice);
    this.apply();
  }

  apply() {
    const isDark = this.choice === "dark" || (this.choice === "auto" && dark.matches);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    this.button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[this.choice];
    this.button.setAttribute("aria-label", `Colors: ${this.choice}`);
  }
}
